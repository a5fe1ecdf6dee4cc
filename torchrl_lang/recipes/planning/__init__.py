"""Memory and time of training and acting, by formulas: the command ``plan``."""
