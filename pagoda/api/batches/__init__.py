"""Files and batches of OpenAI's API, kept in a directory so that a batch goes on after a restart."""
