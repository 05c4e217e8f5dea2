"""Jobs on a bundle itself: what it is made of, how long its parts take, and fewer exits."""
