"""A version is read, tried and warmed up here, in this process or in a runner."""
