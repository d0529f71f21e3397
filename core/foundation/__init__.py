"""Fine-tuning of models of Hugging Face's libraries, none of which is imported before it is needed."""
