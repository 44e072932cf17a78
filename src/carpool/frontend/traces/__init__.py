"""Where the time of single requests went, for whoever wants to know: lines of JSON, and spans."""
