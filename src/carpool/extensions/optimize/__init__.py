"""`carpool optimize`: a cheaper form of a model, which is proven on pictures before it is a version."""
