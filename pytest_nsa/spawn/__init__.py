"""In the zygote, or in a cold interpreter: how ranks are started."""
