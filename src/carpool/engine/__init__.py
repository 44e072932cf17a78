"""The driver around the scheduler: loads models, runs batches on instances, splits the answers.

Law of this folder: one loop thread decides, instance threads run; nothing here knows of HTTP or of pictures.
"""
