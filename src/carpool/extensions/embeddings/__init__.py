"""Answers OpenAI's embeddings for images, as vLLM and Infinity extend them, and lists all models."""
