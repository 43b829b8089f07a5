"""Reference capture: Hugging Face transformers runs the target and every depth is kept."""
