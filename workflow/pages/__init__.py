"""The pages of the book: staged from today's text and the outputs of a run, plain MyST, and rendered by Sphinx."""
