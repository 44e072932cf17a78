"""Offers models as tools to programs that speak the Model Context Protocol: one endpoint with JSON, without
sessions."""
