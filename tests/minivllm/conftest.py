"""A random Qwen3 and ids for it."""

import pytest
import torch
from small_qwen3 import shuffled

from minivllm.qwen3 import Qwen3, Qwen3Config


@pytest.fixture(scope="session")
def toy() -> Qwen3:
    """Three layers, six query heads on two key heads, 1,024 places, no end token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return shuffled(Qwen3(Qwen3Config(500, 48, 80, 3, 6, 2, head_dim=16, max_position_embeddings=1024)))


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """Two texts of 520 tokens."""
    return torch.randint(500, (2, 520), generator=torch.Generator().manual_seed(0))
