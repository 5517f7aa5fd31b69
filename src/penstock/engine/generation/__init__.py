"""Generation as the engine offers it: requests, prompts and answers."""
