// Validates custom resources, JSON on stdin, with the models of @kubernetes-models; prints how many.
import fs from "node:fs";
import * as keda from "@kubernetes-models/keda/keda.sh/v1alpha1";
import * as prometheus from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const models = { ...keda, ...prometheus };
let count = 0;
for (const resource of JSON.parse(fs.readFileSync(0, "utf8"))) {
  new models[resource.kind](resource).validate();
  count += 1;
}
console.log(count);
