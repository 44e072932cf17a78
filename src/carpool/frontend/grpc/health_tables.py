"""The messages of gRPC's health service, package grpc.health.v1; how to read a line is told in schema.py."""

ENUMS = {"HealthCheckResponse.ServingStatus": "UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN"}

MESSAGES = {
    "HealthCheckRequest": "1 service string",
    "HealthCheckResponse": "1 status HealthCheckResponse.ServingStatus",
}
