"""Configurations for what runs Carpool on several machines: balancers, and Kubernetes."""
