"""The recording side: attach to a training process, take values, hand them to the writer.

The only place that imports torch.
"""
