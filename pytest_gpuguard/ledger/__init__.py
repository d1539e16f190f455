"""What was true before: every judgement ever, with the stack and the rig that it was true on."""
