"""What all tests share: the checkout on the path, quiet libraries, no network, Triton's interpreter without a GPU."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell in the background starts us, and we our programs
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
