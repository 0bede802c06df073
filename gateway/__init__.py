"""The public API over one cluster. Imports neither torch nor transformers."""
