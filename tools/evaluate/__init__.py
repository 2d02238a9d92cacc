"""`megatron-gspo evaluate`: accuracy of models on task files; see docs/evaluate.md."""
