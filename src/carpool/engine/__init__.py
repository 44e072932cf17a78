"""The driver around the scheduler: loads models, runs batches on instances, splits the answers.

Law of this folder: one loop thread decides, instance threads run; nothing here knows of HTTP or gRPC.
Pictures come as tensors, except to models that decode them on their device.
"""
