"""Every test starts from the same random numbers, and computes on one thread."""

import pytest
import torch

# On toy tensors the threads of an operator mostly wait for each other: a busy machine makes that fifty times slower.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def compiler():
    """torch's compiler, forgetting what it compiled."""
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()
