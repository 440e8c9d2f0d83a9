"""How a test reaches its ranks: `host` asks, `zygote` forks, `rank` runs; `messages` is what they say to each other."""
