"""Commands that run a saved model: generate, score, chat and serve, and what they share."""
