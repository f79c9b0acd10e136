"""A trained model outside of a run: exported in Hugging Face's layout, opened, compared and evaluated."""
