"""How good is a model on labelled pictures, and is another version worse?"""
