"""Answers clients of Roboflow's inference server, such as `inference-sdk`: models are asked by the names that
they have here."""
