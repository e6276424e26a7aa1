"""What ZeRO-3 needs beside DeepSpeed: its part of each tensor, inputs that change in place."""
