"""Implements several models behind one name: the steps, what goes from one to the next, what is not
needed."""
