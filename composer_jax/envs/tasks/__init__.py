"""Task families and their admission."""
