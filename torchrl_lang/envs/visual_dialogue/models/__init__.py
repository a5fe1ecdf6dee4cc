"""Models of visual dialogues: an answerer and an image guesser, their training and their files."""
