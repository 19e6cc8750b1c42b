"""Pure tensor functions under the hooks: no torch.distributed, no commhooks."""
