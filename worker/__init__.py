"""The worker processes, each holding one MLX model, and the pool that starts and watches them."""
