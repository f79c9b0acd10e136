"""A trained model outside of a run: as a directory of Hugging Face's layout, opened again, compared, measured."""
