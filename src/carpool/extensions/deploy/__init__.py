"""This package writes configurations for several machines: balancers, and Kubernetes."""
