// Loaded before the page is drawn, so that a chosen theme does not flash.
"use strict";
{
  const theme = localStorage.getItem("dynamo-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
