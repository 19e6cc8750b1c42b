"""One file an algorithm: its state, and the coroutine that turns a bucket's gradient into the mean over all ranks."""
