"""Where tests of GPU kernels run: on a GPU, or else in Triton's interpreter on CPU tensors."""

import torch

import tests.kernels.triton_interpreter  # noqa: F401

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
