"""Files: bounded reading of TOML and JSON, and durable writing; the only place that guards files."""
