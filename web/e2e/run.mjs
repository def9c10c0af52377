console.log("e2e: nothing yet");
