//! Operations on layers and on the make-up of attached images.

use serde_json::{json, Value};

use super::request::{Capture, Compact, Export, Import, Prefetch, SaveWorkingSet, Seal, Stage};
use super::service::text;
use super::Service;
use crate::capture;
use crate::image::{self, check_path, CompactRun, LayerSpec, Made, Output, View, WorkingSet};
use crate::{Code, Error};

impl Service {
    pub(super) fn seal(&self, request: &Seal) -> Result<Value, Error> {
        let image = self.table.require(&request.image)?;
        let sealed = image::seal(&image, &request.layer, &self.layers)?;
        let mut reply =
            json!({"layer": text(&sealed.path)?, "bytes": sealed.bytes, "extents": sealed.extents, "durable": false});
        if request.durable || request.digest {
            sealed.finish()?;
            reply["durable"] = true.into();
        }
        if request.digest {
            reply["digest"] = format!("sha256:{}", sealed.digest()?).into();
        }
        if !request.durable && !request.digest {
            image::finish_later(&image, sealed);
        }
        Ok(reply)
    }

    pub(super) fn compact(&self, request: &Compact) -> Result<Value, Error> {
        let output = Output { zfile: request.zfile, digest: request.digest };
        let made = match (&request.layers, &request.image, request.from, request.to) {
            (Some(layers), None, None, None) => {
                let stack = self.layers.stack(layers)?;
                image::compact(stack.layers(), request.base, &request.output, output)?
            }
            (None, Some(name), Some(from), Some(to)) => {
                let image = self.table.require(name)?;
                let run = CompactRun { run: from..to, path: &request.output, output };
                image::compact_run(&image, &run, &self.layers)?
            }
            _ => return Err(Error::invalid("compact takes either \"layers\" or \"image\" with \"from\" and \"to\"")),
        };
        described(&request.output, &made)
    }

    pub(super) fn import(&self, request: &Import) -> Result<Value, Error> {
        let output = Output { zfile: request.zfile, digest: request.digest };
        described(&request.output, &image::import(&request.input, &request.output, output)?)
    }

    pub(super) fn export(&self, request: &Export) -> Result<Value, Error> {
        let view = match (&request.image, &request.layers) {
            (Some(name), None) => {
                let image = self.table.require(name)?;
                image.image()?;
                View::Image(image)
            }
            (None, Some(layers)) => View::Stack(self.layers.stack(layers)?),
            _ => return Err(Error::invalid("export takes either \"image\" or \"layers\"")),
        };
        let output = Output { zfile: request.zfile, digest: request.digest };
        described(&request.output, &image::export(&view, &request.output, request.format, output)?)
    }

    pub(super) fn capture(&self, request: Capture) -> Result<Value, Error> {
        check_path(&request.output)?;
        let base = match request.base[..] {
            [] => None,
            _ => Some(self.capture_base(&request.base, request.mapped)?),
        };
        let Capture { pid, start_time, mappings, output, size, compare, digest, durable, staged, client, .. } = request;
        let request =
            capture::Request { pid, start_time, mappings, base, output, size, compare, digest, durable, method: None };
        let report = match &client {
            None => capture::capture(&request)?,
            Some(client) => {
                let hold = if staged == Some(Stage::Copy) { capture::HELD_LIMIT } else { 0 };
                let (ready, copied) = (|| client.ready(), || client.copied());
                capture::capture_staged(&request, &capture::Stages { hold, ready: &ready, copied: &copied })?
            }
        };
        tracing::info!(pid, dirty = report.dirty_pages, data = report.data_pages, times = ?report.times, "captured");
        let mut reply =
            serde_json::to_value(&report).map_err(|e| Error::caused(Code::Io, "describing a capture", &e))?;
        reply["output"] = text(&request.output)?;
        if let Some(digest) = report.digest {
            reply["digest"] = format!("sha256:{digest}").into();
        }
        Ok(reply)
    }

    fn capture_base(&self, layers: &[LayerSpec], mapped: Option<usize>) -> Result<capture::Base, Error> {
        let there = layers.len();
        let mapped = mapped
            .map(|mapped| match layers.get(..mapped) {
                Some(mapped) => self.layers.stack(mapped),
                None => Err(Error::invalid(format!("the guest maps {mapped} layers of a base that has {there}"))),
            })
            .transpose()?;
        // After the mapped ones, whose stack it then shares.
        Ok(capture::Base { stack: self.layers.stack(layers)?, mapped })
    }

    pub(super) fn save_working_set(&self, request: &SaveWorkingSet) -> Result<Value, Error> {
        let image = self.table.require(&request.image)?;
        let recorder = image
            .recorder()
            .ok_or_else(|| Error::invalid(format!("image {} was attached without \"record\"", request.image)))?;
        let set = recorder.working_set();
        set.save(&request.output)?;
        Ok(json!({"output": text(&request.output)?, "chunks": set.chunks()}))
    }

    pub(super) fn prefetch(&self, request: &Prefetch) -> Result<Value, Error> {
        let image = self.table.require(&request.image)?;
        let set = WorkingSet::load(&request.working_set)?;
        let bytes = image::prefetch(&image, &set)?;
        Ok(json!({"chunks": set.chunks(), "bytes": bytes}))
    }
}

fn described(path: &std::path::Path, made: &Made) -> Result<Value, Error> {
    let mut reply = json!({"output": text(path)?, "bytes": made.bytes, "extents": made.extents});
    if let Some(digest) = made.digest {
        reply["digest"] = format!("sha256:{digest}").into();
    }
    Ok(reply)
}
