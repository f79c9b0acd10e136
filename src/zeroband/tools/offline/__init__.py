"""Commands on a trained model: export, evaluation on held-out text, sampling."""
