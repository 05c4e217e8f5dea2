"""What serving.py beside this folder measures offramp against."""
