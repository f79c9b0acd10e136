"""What is done with a trained model: exporting it, measuring its loss on held-out text, sampling. Joins no run."""
