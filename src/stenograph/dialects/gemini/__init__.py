"""Google's Gemini API: `generateContent`, `streamGenerateContent` and `countTokens`. Pure."""
