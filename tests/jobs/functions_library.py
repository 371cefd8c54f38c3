"""Functions that a training script takes from elsewhere."""

import torch


def attention(q, k, v, causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def unused(x):
    return x


class Targets:
    @staticmethod
    def zeros(like):
        return torch.zeros_like(like)
