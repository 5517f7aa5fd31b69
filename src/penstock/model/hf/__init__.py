"""Hugging Face folders of the families that the decoder covers: config.json, parameter names, safetensors files."""
