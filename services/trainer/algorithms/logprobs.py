"""Logprobs and entropy of the sampling distribution, from logits.

Temperature divides the logits: the distribution that was sampled from is softmax(logits / T), and dividing
logprobs instead gives the logprobs of no distribution.
"""

from __future__ import annotations

import torch

# U position, V vocabulary, K token


def scaled(logits_UV: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / T in fp32."""
    logits_UV = logits_UV.float()
    return logits_UV if temperature == 1.0 else logits_UV / temperature


def token_logprobs(logits_UV: torch.Tensor, position_K: torch.Tensor, token_K: torch.Tensor) -> torch.Tensor:
    """log softmax(logits[position])[token] for every token; one position may score several tokens."""
    log_norm_U = torch.logsumexp(logits_UV, dim=-1)
    return logits_UV[position_K, token_K] - log_norm_U[position_K]


@torch.no_grad()
def entropies(logits_UV: torch.Tensor) -> torch.Tensor:
    """Entropy of softmax(logits) at every position, in nats: log Z - sum p * logit. No gradient."""
    log_norm_U1 = torch.logsumexp(logits_UV, dim=-1, keepdim=True)
    probabilities_UV = (logits_UV - log_norm_U1).exp_()
    expected_U = torch.einsum("uv,uv->u", probabilities_UV, logits_UV)
    return log_norm_U1.squeeze(-1) - expected_U
