"use strict";
const scene = JSON.parse(document.getElementById("data").textContent);
const facts = document.getElementById("facts");
const picture = graphView(document.getElementById("graph"), scene, (index) => {
  facts.replaceChildren(...regionFacts(scene, index, null));
});
facts.replaceChildren(...regionFacts(scene, -1, null));
document.getElementById("legend").replaceChildren(...patternLegend(scene, picture));
