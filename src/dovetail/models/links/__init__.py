"""Carries the bytes of a weight transfer to a receiver, by CUDA IPC, NCCL or Gloo
(`dovetail.models.transfer.Channel`)."""
