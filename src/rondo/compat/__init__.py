"""Other systems' keys, translated at the door. Asked for only where a key is not ours."""
