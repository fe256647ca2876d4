"""Llama-like models run without their modules: functions over fused weights that follow the live parameters."""
