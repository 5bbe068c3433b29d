bench: $(STAMP) ## speed, beside Stable-Baselines3 and SBX where they are installed: make bench [only=peers,time]
	@$(SPLIT_ARGS) exec $(VENV_PYTHON) -m bench $(ARGUMENTS) $(SPLIT)
